"""Update phase: advantages, objectives, micro-batches."""
