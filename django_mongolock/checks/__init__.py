"""System checks: ``manage.py check`` reports a wrong setting before it causes an error at run time.

An id is never used for another check. E0xx and W0xx need no server; E1xx and W1xx ask it (``check --database``).
"""

from .database import check_kinds as check_kinds
from .database import check_server_facts as check_server_facts
from .locked import check_shared_locks as check_shared_locks
from .locked import check_views as check_views
from .project import check_deployment as check_deployment
from .project import check_settings as check_settings
