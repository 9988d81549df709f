{{/* Contradictions between values, which a schema cannot state. Every file includes it, because their order is not defined. */}}
{{- define "meridian.check" -}}
{{- $v := .Values -}}
{{- $joins := eq $v.identity.source "join-tokens" -}}
{{- $process := eq $v.spoke.actuator "process" -}}
{{- $hubs := int $v.hub.replicas -}}
{{- if and (not $v.hub.enabled) (not $v.hubs) }}{{ fail "hubs: is empty; name the URLs of the hubs, or set hub.enabled" }}{{ end -}}
{{- if $v.hub.enabled }}
{{- if $v.hubs }}{{ fail "hubs: has no effect with hub.enabled; remove it" }}{{ end -}}
{{- if and (gt $hubs 1) (ne $v.hub.store.kind "etcd") }}{{ fail (printf "hub.replicas: %d hubs need hub.store.kind: etcd" $hubs) }}{{ end -}}
{{- if and (gt $hubs 1) $joins }}
{{- fail (printf "hub.replicas: %d hubs share no authority of a volume; set identity.source to cert-manager or secrets" $hubs) }}
{{- end -}}
{{- if and (eq $v.hub.store.kind "etcd") (not $v.hub.store.endpoints) }}{{ fail "hub.store.endpoints: is empty; name the members of the etcd" }}{{ end -}}
{{- end -}}
{{- if and $process (not $joins) }}
{{- fail "spoke.actuator: process needs the authority of the hub for its replicas; set identity.source to join-tokens, or spoke.actuator to kubernetes" }}
{{- end -}}
{{- if and $joins $v.replicas }}
{{- fail "replicas: pods of one workload cannot share join tokens; set identity.source to cert-manager or secrets, or remove them and set spoke.actuator to process" }}
{{- end -}}
{{- if and $process $v.spoke.enabled (ne (int $v.spoke.replicas) 1) }}
{{- fail (printf "spoke.replicas: %d spokes cannot share replicas in one of their pods; write 1, or set spoke.actuator to kubernetes" (int $v.spoke.replicas)) }}
{{- end -}}
{{- if and $v.spoke.advertise (ne (len $v.spoke.advertise) (int $v.spoke.replicas)) }}
{{- fail (printf "spoke.advertise: has %d addresses for %d spokes; write one for each" (len $v.spoke.advertise) (int $v.spoke.replicas)) }}
{{- end -}}
{{- $names := dict -}}
{{- range $v.replicas }}
{{- $name := include "meridian.workload" (dict "root" $ "name" .name) -}}
{{- if hasKey $names $name }}{{ fail (printf "replicas: %s and %s have the same workload %s; rename one" (get $names $name) .name $name) }}{{ end -}}
{{- if gt (len $name) 52 }}{{ fail (printf "replicas: the name of the workload %s is longer than 52 characters" $name) }}{{ end -}}
{{- $_ := set $names $name .name -}}
{{- end -}}
{{- end -}}
