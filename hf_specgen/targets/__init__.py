"""The target model as the decoding loop runs it: cache, masks, positions, hidden states, early exit."""
