"""Values of replicas: one for each replica, possibly still being computed."""
