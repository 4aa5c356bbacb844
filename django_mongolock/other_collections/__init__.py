"""Other collections than that of the locks: what sends commands to them, where they are, and the fields of documents.

For document locks and fenced updates. No lock needs it.
"""
