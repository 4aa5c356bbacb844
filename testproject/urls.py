"""The shop, the external service, the admin, and the static files."""

from django.contrib import admin
from django.contrib.auth.views import LoginView
from django.contrib.staticfiles.views import serve
from django.urls import include, path

urlpatterns = [
    path("", include("testproject.shop.urls")),
    path("external/", include("testproject.external.urls")),
    path("login/", LoginView.as_view(template_name="shop/login.html"), name="login"),
    path("admin/", admin.site.urls),
    # Without DEBUG and without a second server, this is enough for a demo on the loopback interface.
    path("static/<path:path>", serve, {"insecure": True}),
]
