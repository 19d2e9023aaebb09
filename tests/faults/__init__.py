"""The fault table: what goes wrong × when × start method, with real processes and real signals."""
