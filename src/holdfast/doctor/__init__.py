"""What will kill workers on this machine with this loader, before it does: `holdfast doctor`."""
