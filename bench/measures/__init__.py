"""Measurements that ``outrider bench`` has no load for: what ``measure_serving.py`` and ``compare_texts.py`` run.

Each talks to a running server as any client does, and returns what it saw as a dictionary for JSON: what a cached
prefix saves (``prefix``), what running streams feel of a prompt that enters (``entering``), more text than the cache
holds (``oversubscribed``), many streams against one (``batch``), and whether texts are the same in any company
(``compare``).
"""
