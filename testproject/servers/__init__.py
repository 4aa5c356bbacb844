"""Real servers for the demo, the tests and the benchmarks, on loopback ports, in temporary directories.

    with ReplicaSet(members=3) as replica_set:
        client = MongoClient(replica_set.uri)
        replica_set.primary().kill()

The servers end with the process that started them.
"""

from testproject.servers.docker import Docker
from testproject.servers.mariadb import MariaDB
from testproject.servers.mongo import Access, Mongod, ReplicaSet, mongod_path, mongodb
from testproject.servers.postgres import Postgres
from testproject.servers.process import Server, ServerError
from testproject.servers.rabbitmq import RabbitMQ
from testproject.servers.redis import Redis
from testproject.servers.zookeeper import ZooKeeper

__all__ = [
    "Access",
    "Docker",
    "MariaDB",
    "Mongod",
    "Postgres",
    "RabbitMQ",
    "Redis",
    "ReplicaSet",
    "Server",
    "ServerError",
    "ZooKeeper",
    "mongod_path",
    "mongodb",
]
