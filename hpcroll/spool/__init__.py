"""The spool: a job queue on a shared file system, coordinated by hard links."""
