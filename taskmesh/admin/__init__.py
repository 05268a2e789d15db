"""Operations for people: filters, listings, counts, explain, doctor, bulk actions."""
