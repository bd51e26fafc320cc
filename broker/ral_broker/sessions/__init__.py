"""Running envelopes: starting one, knowing it, finding it again after a restart."""
