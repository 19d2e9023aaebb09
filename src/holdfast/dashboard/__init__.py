"""The web page of `holdfast dash`: a server beside the jobs, which reads what they publish."""
