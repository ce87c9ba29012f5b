"""From files to batches: readers, named sets, shards on disk, objectives, and where a stream is."""
