"""The pool: a `concurrent.futures.Executor` that no task can break."""
