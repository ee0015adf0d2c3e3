"""What the forms of the delta rule share: arguments, gate, recurrence, decoding."""
