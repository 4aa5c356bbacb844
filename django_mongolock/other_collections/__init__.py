"""Collections other than that of the locks: the sender of commands, the places, and the fields of documents.

Document locks and fenced updates use them. No other lock needs them.
"""
