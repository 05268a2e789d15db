"""What people and programs can ask of a mesh, a row each, whatever the face: REST, forms of the dashboard, `taskmesh call`.

In reading order: `requests` (what may be said), `table` (what is done). A row needs no extra: only faces do.
"""
