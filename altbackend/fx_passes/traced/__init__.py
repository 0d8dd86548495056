"""Rules whose patterns are traced from Python functions, loaded from `serialized/` without tracing."""
