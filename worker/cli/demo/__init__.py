"""``volume-worker demo``: the main job, start to end, on this machine, told as a story.

Everything is real (workers, broker, database, targets, a file system) and of the demo's own; all of
it is gone afterwards, however it ends.
"""
