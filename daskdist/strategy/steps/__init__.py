"""Steps: ordered streams of calls from the program to the replicas of a cluster's workers."""
