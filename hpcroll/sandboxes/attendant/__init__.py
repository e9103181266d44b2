"""The process that stands beside a sandbox and runs commands in it; standard library only.

It is started as `python -I -S -c "…; from attendant.main import main"`, so its modules import each
other relatively: they have two names, `attendant.*` there and `hpcroll.sandboxes.attendant.*` here.
"""
