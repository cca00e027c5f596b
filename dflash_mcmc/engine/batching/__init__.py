"""The engine of slots: scheduler, cache, forwards and the plan of memory; and the interface of all engines."""
