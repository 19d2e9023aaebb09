"""The web page of `outlive dash`: a server beside the jobs, which reads what they publish."""
