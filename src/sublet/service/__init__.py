"""What people may ask and see: commands change things through the inbox, queries read. Faces stand on these alone."""
