"""Copies of a node's objects in the memory of other nodes: who holds them, how they get there and back.

`placement`, `membership` and `messages` are pure; the agent's process carries out what they and
`flashpoint.retention` and `flashpoint.retrieval` decide.
"""
