"""Document locks under virtual time: their steps are the real ones; the collection and the sender are not."""
