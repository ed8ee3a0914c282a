"""How bytes are fetched from remote storage: backends, retries, and a process for them.

::

    source ─► Client ─► Engine ─► Backend (obstore, fsspec, local files)
               │ in this process, or through a Helper in a process of its own

Cloud clients run threads and locks of their own, which do not survive a fork: a child of a
process that has used one hangs or crashes. Training scripts fork. So such a client is never used
in a process that runs the user's code: it lives in a helper process, started by exec.
"""
