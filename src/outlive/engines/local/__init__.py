"""Workers on this machine, forked by a zygote."""
