"""How figures of the report document are read, worded and drawn; shared by reports and screens."""
