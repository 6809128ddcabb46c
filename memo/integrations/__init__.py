"""memo in the training loops of other packages: one short module for each, imported by the user and by nothing else.

docs/integrations/README.md has the table: what to write, the version that was tested, and what the report then says.
"""
