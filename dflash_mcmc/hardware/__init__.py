"""Hardware: where a run computes and how many chains at once. Never changes what comes out in float32 on a CPU."""
