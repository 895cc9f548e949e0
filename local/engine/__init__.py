"""What runs inside the ministack child process: one small file for each service that is repaired or added."""
