"""The fleet's decisions alone, without a process: each transition of the machine."""
