"""Plain data that more than one room speaks: settings of a request, proposals, plans, block bookkeeping, errors.

Nothing here imports torch, gRPC servers, Ray or Redis, and nothing here waits.
"""
