"""Study of students that learn a teacher network whose weights are known."""
