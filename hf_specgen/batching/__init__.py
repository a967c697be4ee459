"""Many prompts or requests at a time: steps that several `generate` calls share."""
