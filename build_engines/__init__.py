"""From a deployment spec to a checkpoint, an engine for a target, and the model repository that serves it."""
