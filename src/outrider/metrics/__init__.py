"""What all processes need to be read by Prometheus: how a metric is declared, written as text, and served.

Each process declares its metrics as data (``router/metric_names.py``, ``workers/target/metrics.py``,
``workers/draft/metrics.py``, ``cluster/metrics.py``) and reads them, when it is asked, from the counts that it keeps
anyway. docs/metrics.md lists them; a test compares.
"""
