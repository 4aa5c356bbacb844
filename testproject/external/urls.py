"""The service's one address."""

from django.urls import path

from testproject.external.views import AdView

urlpatterns = [path("ads/<str:ad_id>/", AdView.as_view(), name="external-ad")]
