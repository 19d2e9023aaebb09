"""The dashboard: findings in words, a real server over real sockets, and the page in a real browser."""
