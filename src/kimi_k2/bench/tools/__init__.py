"""How well a server calls tools, by the criteria of Moonshot's K2-Vendor-Verifier."""
