//! Exchange of a gateway's demand for its rows of the traffic plan. The demand is sent as changes of the one that the hub has
//! acknowledged ([`DemandReporter`]). Failover to another hub is decided by the poll of the
//! route table ([`crate::table`]), because a healthy hub may have no plan.

use http::StatusCode;
use regions::RegionId;
use scheduler_api::paths;
use scheduler_api::plan::{DemandReporter, DemandV1, GatewayWeights, WeightsV1};

use crate::hub::{ControlPlaneClient, EXCHANGE_TIMEOUT, HubCallError, HubRequest};
use crate::snapshot::Snapshot;

/// Exchange of a gateway in one region with the current hub.
#[derive(Debug)]
pub struct PlanExchange {
    client: ControlPlaneClient,
    gateway: RegionId,
    snapshot: Snapshot,
    reporter: DemandReporter,
}

impl PlanExchange {
    /// Creates the exchange of the gateway in this region, whose current rows are in `snapshot`.
    pub fn new(client: ControlPlaneClient, gateway: RegionId, snapshot: Snapshot) -> PlanExchange {
        PlanExchange { client, gateway, snapshot, reporter: DemandReporter::default() }
    }

    /// Reports the demand. Returns the gateway's rows if they are newer than the current ones; they are on disk then.
    ///
    /// # Errors
    ///
    /// When there is no valid response; the current rows stay.
    pub async fn exchange(&mut self, demand: &DemandV1) -> Result<Option<GatewayWeights>, HubCallError> {
        let PlanExchange { client, gateway, snapshot, reporter } = self;
        let path = paths::demand(snapshot.generation());
        let hub = client.hubs().current().to_owned();
        let (report, has_changes) = reporter.report(demand);
        let request = HubRequest::post(path.clone(), &report, EXCHANGE_TIMEOUT);
        let mut received = client.send::<Option<WeightsV1>>(&request).await;
        if has_changes && received.as_ref().is_err_and(is_rejected) {
            reporter.rejected();
            let (report, _) = reporter.report(demand);
            received = client.send(&HubRequest::post(path, &report, EXCHANGE_TIMEOUT)).await;
        }
        let received = received?;
        reporter.acknowledged(demand);
        let Some(rows) = received else { return Ok(None) };
        let check = |rows: &mut GatewayWeights| match &rows.gateway {
            other if other == gateway => Ok(()),
            other => Err(format!("it is for the gateway in {other}, this gateway is in {gateway}")),
        };
        snapshot.accept(rows, check).await.map(Some).map_err(|failure| HubCallError { hub, failure })
    }
}

/// Returns whether the hub rejects changes, because it does not have the demand that they change (409) or does not know
/// changes (400).
fn is_rejected(error: &HubCallError) -> bool {
    matches!(error.failure.status(), Some(StatusCode::CONFLICT | StatusCode::BAD_REQUEST))
}
