"""What people and programs can ask of a mesh, whatever the face: REST, forms of the dashboard, `taskmesh call`.

`table` has a row for each. A row needs no extra: only the faces do.
"""
