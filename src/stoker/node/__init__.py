"""What our processes on one machine share beside memory: files, locks, sockets, each other.

Left needs nothing of what stands to the right::

    descriptors ─► owned ─► locks, runtime_dir ─► messages ─► rendezvous, supervisor

- :mod:`~stoker.node.owned`: which files are believed; :mod:`~stoker.node.runtime_dir`: where ours
  lie; :mod:`~stoker.node.memory`: how much memory there is.
- :mod:`~stoker.node.descriptors`: owned once, kept from forked children, passed to spawned ones.
- :mod:`~stoker.node.locks`: of open file descriptions, so that they end with their process.
- :mod:`~stoker.node.messages`: lines and packets of JSON, with descriptors, between our processes.
- :mod:`~stoker.node.rendezvous`: one process makes shared memory, the others find it.
- :mod:`~stoker.node.supervisor` and :mod:`~stoker.node.supervised`: a process that several others
  share, started by the first, replaced when it dies, and gone after the last;
  :mod:`~stoker.node.child`: how any process of ours is started.
"""
