"""What tests share: waiting, servers, documents, processes, browsers."""
