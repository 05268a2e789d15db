"""People who look and act: filters, listings, counts, explain, doctor, bulk actions."""
