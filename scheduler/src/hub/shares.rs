//! Shares of gateways in the rate limits of tenants: the response to the demand that a gateway reports
//! ([`super::tenant_demands`]), and the list for operators.

use axum::Json;
use axum::extract::State;
use scheduler_api::VERSION;
use scheduler_api::paths;
use scheduler_api::plan::{AllSharesV1, SharesResponseV1, TenantDemand, TenantDemandV1, TenantSharesV1};
use scheduler_store::Store;

use super::access::Caller;
use super::api::{Body, HubApi, json};
use crate::respond::ErrorResponse;

/// Records the demand of tenants at a gateway, and responds with its shares if they are newer than the gateway's. Tenants
/// that are not in the published table, or have no limits there, are left out.
pub(super) async fn report<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    body: Body,
) -> Result<Json<SharesResponseV1>, ErrorResponse> {
    let mut demand = TenantDemand::try_from(json::<TenantDemandV1>(body)?)?;
    api.check_region(&demand.gateway.region)?;
    caller.check_region(&api, &demand.gateway.region, paths::TENANT_DEMAND)?;
    let published = api.current.borrow().clone();
    let tenants = published.as_ref().and_then(|published| published.table.tenants.as_ref());
    demand.tenants.retain(|tenant, _| {
        let rules = tenants.and_then(|tenants| tenants.all.get(tenant));
        rules.is_some_and(|rules| rules.limits.per_minute().into_values().iter().any(Option::is_some))
    });
    let (gateway, running) = (demand.gateway.clone(), demand.running);
    api.tenant_demands.record(&api.store, api.lease_ttl, demand).await?;
    let (gateways, shares) = api.plans.shares(&gateway, running);
    let shares = shares.as_ref().map(TenantSharesV1::from);
    Ok(Json(SharesResponseV1 { version: VERSION, gateways, shares }))
}

/// Responds with the shares of all gateways, for operators.
pub(super) async fn all<S: Store>(State(api): State<HubApi<S>>) -> Json<AllSharesV1> {
    Json(api.plans.all_shares())
}
