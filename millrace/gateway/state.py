"""The state of one gateway process. Everything in it can be rebuilt by another gateway."""

from __future__ import annotations

import secrets
import ssl
from pathlib import Path

import aiohttp
from aiohttp import web

from millrace.gateway.auto_model import AutoModel
from millrace.gateway.fleet import Fleet
from millrace.gateway.key_learner import KeyLearner
from millrace.gateway.limits.limits import Limits, store_named
from millrace.gateway.metrics import GatewayMetrics
from millrace.gateway.replica_http.client import ReplicaClient
from millrace.gateway.rollout.shadow import Shadow
from millrace.gateway.routing.homes import Homes
from millrace.gateway.routing.model_list import may_use
from millrace.gateway.settings import GatewaySettings
from millrace.gateway.watch.replicas import Watch
from millrace.observe.tracing.exporter import SpanExporter
from millrace.serve.tenancy.cache_scope import gateway_salt
from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Keyring, Tenant, wrong_model
from millrace.serve.tenancy.owner import gateway_owner


class GatewayState:
    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls`: for replicas on https."""
        self.settings = settings
        self.fleet = fleet
        self.session = session
        self.client = ReplicaClient(settings.connect_s, fleet.clock, tls)
        """Carries requests of clients; `session` carries the gateway's own questions."""
        self.watch = Watch(fleet, session)
        self.learner = KeyLearner(self.watch)
        self.limits = Limits(store_named(settings.limits_store))
        self.auto = AutoModel(settings.router, fleet, self.limits) if settings.router is not None else None
        self.shadow: Shadow | None = None
        self.spans = SpanExporter(settings.otlp_url) if settings.otlp_url else None
        self.metrics = GatewayMetrics(fleet, self.limits)
        self.homes = Homes()
        self.keyring = Keyring(Path(settings.keys_file)) if settings.keys_file else None
        known = settings.gateway_key or settings.replica_key
        self._salt_secret = (known or secrets.token_hex()).encode()
        self._owner_secret = known.encode()
        """What is stored outlives the gateway, so this is not drawn."""
        self._salts: dict[tuple[str, bool | None], str] = {}
        self._owners: dict[tuple[str, bool], str] = {}
        """Computed once for each tenant of the keys file: two digests are dear beside the rest of a request."""
        self.is_draining = False
        self.num_open = 0

    def salt_of(self, tenant: Tenant) -> str:
        """What keeps the tenant's cached prefixes apart at replicas. Gateways with the same key send the same."""
        if tenant is DEFAULT_TENANT:
            return ""
        known = tenant.name, tenant.private_cache
        if known not in self._salts:
            share = self.settings.share_prefixes
            self._salts[known] = gateway_salt(tenant, self._salt_secret, share_prefixes=share)
        return self._salts[known]

    def may_use(self, tenant: Tenant, model: str) -> bool:
        return may_use(tenant, [one.models for one in self.fleet.replicas.values()], model)

    def check_model(self, tenant: Tenant, model: str) -> None:
        if not self.may_use(tenant, model):
            raise wrong_model(tenant, model)

    def owner_of(self, tenant: Tenant) -> str:
        """To whom replicas without keys say that things belong."""
        if tenant is DEFAULT_TENANT:
            return ""
        known = tenant.name, tenant.operator
        if known not in self._owners:
            self._owners[known] = gateway_owner(tenant, self._owner_secret)
        return self._owners[known]


STATE = web.AppKey("gateway", GatewayState)
