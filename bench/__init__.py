"""Load for a running server, and what it shows: the benchmark behind ``outrider bench``.

Workloads (``workloads``) become requests (``items``), which are sent in two *arms*, plain decoding and speculation,
that take turns within one run (``plan``, ``run``). What the client saw of each request (``records``) is summed up
(``summary``, ``numbers``) and shown (``table``, ``plots``). Other servers run the same items in ``peers``.
"""
