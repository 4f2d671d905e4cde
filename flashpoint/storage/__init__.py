"""Long-term storage: complete versions are drained to a folder or a bucket, and loaded from there when memory is gone.

schedule        which version to drain next, which to delete (pure)
records         names and small records in the storage (pure)
store, local, cloud   where bytes go: files, or an object store through obstore
claim           whose storage it is, checked when the job starts
source, drain   the agent's side: read from memory, verify, write
by_hand         a drain that an operator asks for, with or without an agent
loading         the trainer's side: a view whose bytes come by range reads
"""
