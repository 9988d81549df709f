{{/* Prefix of all names, short enough for those of workloads and pods. */}}
{{- define "meridian.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a role; takes (root, role). */}}
{{- define "meridian.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "meridian.labels" -}}
{{ include "meridian.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Name of the workload of a deployment, as the spoke derives it: lower-case letters, digits and -. */}}
{{- define "meridian.workload" -}}
{{ include "meridian.fullname" .root }}-replica-{{ .name | lower | replace "_" "-" | replace "." "-" }}
{{- end -}}

{{- define "meridian.image" -}}
{{- $image := .image | default dict -}}
{{- printf "%s:%s" ($image.repository | default .root.Values.image.repository) ($image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}

{{/* DNS name of a pod of a StatefulSet; takes (root, role, number). */}}
{{- define "meridian.podName" -}}
{{- $set := printf "%s-%s" (include "meridian.fullname" .root) .role -}}
{{- printf "%s-%d.%s.%s.svc.%s" $set (int .number) $set .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{/* URLs of the hubs, as a YAML list. */}}
{{- define "meridian.hubs" -}}
{{- if .Values.hub.enabled -}}
{{- range $number := until (int .Values.hub.replicas) }}
- https://{{ include "meridian.podName" (dict "root" $ "role" "hub" "number" $number) }}:7000
{{- end }}
{{- else -}}
{{ toYaml .Values.hubs }}
{{- end -}}
{{- end -}}

{{/* [identity] of a role's configuration, as YAML; takes (root, role). */}}
{{- define "meridian.identity" -}}
{{- if eq .root.Values.identity.source "join-tokens" -}}
dir: {{ ternary "/var/lib/meridian/pki/hub" "/var/lib/meridian/identity" (eq .role "hub") }}
{{- else -}}
certificate: /etc/meridian/identity/tls.crt
key: /etc/meridian/identity/tls.key
authorities: /etc/meridian/identity/ca.crt
{{- end -}}
{{- end -}}

{{/* Secret with the identity of a role; takes (root, role). */}}
{{- define "meridian.identitySecret" -}}
{{- if eq .root.Values.identity.source "cert-manager" -}}
{{ include "meridian.fullname" .root }}-{{ .role }}-identity
{{- else -}}
{{ required (printf "identity.secrets.%s: is empty; name the secret with the identity of this role" .role) (get .root.Values.identity.secrets .role) }}
{{- end -}}
{{- end -}}

{{/* A configuration file: the chart's keys (YAML) with those of the values; takes (keys, config). Helm reads every number of the
     values as a floating-point number, so whole numbers lose the ".0" that they would get. */}}
{{- define "meridian.toml" -}}
{{- $keys := fromYaml .keys -}}
{{- if hasKey $keys "Error" }}{{ fail $keys.Error }}{{ end -}}
{{- $text := mustMergeOverwrite $keys (deepCopy .config) | toToml -}}
{{- regexReplaceAll "(?m)^(\\s*[A-Za-z0-9_-]+ = -?[0-9]+)\\.0$" $text "${1}" -}}
{{- end -}}

{{/* Fields of the spec of every pod; takes (root, values, selector). */}}
{{- define "meridian.podSpec" -}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int .values.terminationGracePeriodSeconds }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  # Not Always: it would make keys on volumes readable for the group at each start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: {{ $.root.Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{- $.selector | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "meridian.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Environment of a container that knows the name of its pod. */}}
{{- define "meridian.podNameVariable" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}

{{/* Arguments with which a process joins. The pod's name selects its token. */}}
{{- define "meridian.joinArguments" -}}
{{- if eq .root.Values.identity.source "join-tokens" }}
- --join-file
- /etc/meridian/tokens/$(POD_NAME)
{{- end }}
{{- end -}}

{{- define "meridian.identityMount" -}}
{{- if ne .root.Values.identity.source "join-tokens" }}
- {name: identity, mountPath: /etc/meridian/identity, readOnly: true}
{{- else if ne .role "hub" }}
- {name: tokens, mountPath: /etc/meridian/tokens, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volume of the identity. A secret that is mounted without subPath is updated by the kubelet when it is renewed. */}}
{{- define "meridian.identityVolume" -}}
{{- if ne .root.Values.identity.source "join-tokens" }}
- name: identity
  secret: {secretName: {{ include "meridian.identitySecret" . }}, defaultMode: 0440}
{{- else if ne .role "hub" }}
- name: tokens
  secret: {secretName: {{ .root.Values.identity.joinTokens.secret }}, defaultMode: 0440, optional: true}
{{- end }}
{{- end -}}

{{/* Claim of the volume of a StatefulSet; takes the values of the role. */}}
{{- define "meridian.claim" -}}
- metadata: {name: data}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storage.storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
    resources: {requests: {storage: {{ .storage.size }}}}
{{- end -}}

{{/* Probes of a role with /livez and /readyz on its operations port. */}}
{{- define "meridian.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: operations}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: operations}
  periodSeconds: 10
  timeoutSeconds: 2
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: operations}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{- define "meridian.budget" -}}
{{- if .root.Values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "meridian.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .root.Values.podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- .selector | nindent 6 }}
{{- end }}
{{- end -}}
