"""What jobs publish, and what viewers make of it: real loaders, pools, processes and terminals."""
