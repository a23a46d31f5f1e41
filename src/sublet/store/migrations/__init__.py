"""How the tables came to be, step by step; run by `sublet.store.schema`, never by hand."""
