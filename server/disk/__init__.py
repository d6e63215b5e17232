"""What the server keeps on disks beside a checkpoint: in which folders, and how it is read and written."""
